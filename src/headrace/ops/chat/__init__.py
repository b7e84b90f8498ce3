"""Conversations: templates and the spans that are trained on (`template`), token ids (`tokenize`), prefixes (`expand`)."""
