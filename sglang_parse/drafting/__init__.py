"""Who writes drafts: the draft model and the EAGLE-3 head, behind one interface."""
