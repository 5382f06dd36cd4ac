"""Training and measuring of the sample model: `python -m epikv.sample NAME`. Its problems are in
`epikv.sample`."""
