"""One pass of the target model: its rows, its layout in memory, its logits."""
