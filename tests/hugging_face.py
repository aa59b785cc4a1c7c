"""The Hugging Face model of a shape of ours, with weights of its own."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from stack.config import schema as config


def same_shape(c: config.Model, num_rows: int, **settings: Any) -> PreTrainedModel:
    """Qwen3 has norms on queries and keys, Llama has not; ``settings`` go into the Hugging Face configuration."""
    kinds = (Qwen3Config, Qwen3ForCausalLM) if c.qk_norm else (LlamaConfig, LlamaForCausalLM)
    return kinds[1](
        kinds[0](
            vocab_size=num_rows,
            hidden_size=c.d,
            intermediate_size=c.ffn,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_dim,
            max_position_embeddings=c.context,
            rms_norm_eps=c.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            tie_word_embeddings=True,
            attention_bias=False,
            **settings,
        )
    ).eval()
