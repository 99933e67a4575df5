"""The command line: the only place with click, tqdm and printing."""
