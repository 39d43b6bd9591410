"""Who writes drafts: the draft model and the target's head, behind one interface."""
