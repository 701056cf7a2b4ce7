"""Named benchmarks: base, experts and tasks under one name."""
