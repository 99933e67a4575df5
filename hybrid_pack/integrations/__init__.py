"""Packs in other people's programs; each subfolder is the only place that imports what it is for."""
