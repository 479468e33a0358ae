"""The trainers of other libraries, by their names, on outpace's loop."""
