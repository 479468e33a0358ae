"""What people see: metrics, console, the run directory's files, callbacks, the doctor."""
