"""Where the parts live: in this process or in children, behind the same protocols."""
