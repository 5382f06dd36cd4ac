"""`epikv export` on configurations and sizes that no checkpoint at hand has."""
