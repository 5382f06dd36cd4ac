"""`epikv calibrate` on made-up traces, of which is known what it ought to find."""
