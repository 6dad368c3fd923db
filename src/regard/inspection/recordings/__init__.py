"""The parts of a recording: its layers, its texts, and its files."""
