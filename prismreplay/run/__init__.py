"""Phase 2: sandbox ranks run the real program in a world whose other ranks are virtual."""
