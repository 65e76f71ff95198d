"""A decode step of Flash's attention shapes on a GPU: what each strategy costs, in each run mode."""
