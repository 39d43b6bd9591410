"""As much of SGLang's TokenizerManager as a request passes on its way."""

from types import SimpleNamespace


class FakeManager:
    server_args = SimpleNamespace()

    def __init__(self, mm_processor=None, architecture="LlamaForCausalLM"):
        self.mm_processor = mm_processor
        config = SimpleNamespace(architectures=[architecture])
        self.model_config = SimpleNamespace(hf_config=config)
