"""How long communications take on the real backend, for groups that no slice runs as a whole."""
