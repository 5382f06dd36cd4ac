"""Programs that run one peer each, with the Python of its virtual environment: none imports epikv."""
