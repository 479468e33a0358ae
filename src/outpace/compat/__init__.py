"""Scripts of other libraries on outpace: the same names and arguments, as thin layers over `outpace.Trainer`."""
