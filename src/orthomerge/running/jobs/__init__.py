"""A run cut into jobs that any number of workers carry out: on one machine, on Ray, as a Slurm array, over ssh."""
