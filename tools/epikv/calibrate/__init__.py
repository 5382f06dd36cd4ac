"""`epikv calibrate`: measures what a policy must know of a model."""
