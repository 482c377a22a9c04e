"""Compression of arrays into shorter messages, and what a message leaves out. It knows no transport and no model."""
