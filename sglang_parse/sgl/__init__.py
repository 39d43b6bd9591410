"""A typed layer over SGLang's model runner, KV pools, sampler and grammars."""
