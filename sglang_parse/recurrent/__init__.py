"""Optional: targets with a recurrent state (gated delta nets), on a CPU."""
