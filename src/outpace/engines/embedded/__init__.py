"""The engine built into outpace: a decode loop over slots, on one compute thread."""
