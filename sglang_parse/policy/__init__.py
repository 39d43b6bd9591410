"""How much is drafted, by whom, and what is judged; pure, from measured costs."""
