"""Which policy at which budget: what `epikv advise` measures, and what it may promise."""
