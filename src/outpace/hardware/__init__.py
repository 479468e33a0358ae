"""Hardware of this machine: placement on GPUs, CPU cores and threads, memory estimates."""
