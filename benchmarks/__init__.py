"""One script for each question; each compares with a named baseline in the same run and keeps a JSON result."""
