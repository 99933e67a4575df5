"""What the bits mean: code books and scale encodings. Pure tables and functions, no I/O, no layout."""
