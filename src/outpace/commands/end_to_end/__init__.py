"""The parts of `outpace bench end-to-end`: the work, the two systems, the limit and the report."""
