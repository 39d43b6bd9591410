"""SGLang programs on PARSE's primitives, one idea each; see README.md."""
