"""Text to tokens: normalisation, segments, streaming clauses, tokenizer, pronunciation."""
