"""The vLLM plugin: quantisation method ``hybrid_pack``, chosen by the pack's config.json.

``register`` is the target of the ``vllm.general_plugins`` entry point. vLLM calls it in every process, for every model,
so importing this module costs nothing and nothing it does can stop vLLM from serving other models.
"""

from __future__ import annotations

import logging

QUANT_METHOD = "hybrid_pack"
"""Name of the method, as ``convert`` writes it to config.json."""


def register() -> None:
    """Make vLLM know the quantisation method; called again, it does nothing.

    Outside of the supported versions, and where vLLM lacks what the method is made of, a method is registered that says
    so when a pack is asked for.
    """
    try:
        from hybrid_pack.integrations.vllm.registration import register_method

        register_method()
    except Exception as error:
        # A plugin that raises takes vLLM down, whatever model was asked for.
        logging.getLogger("vllm.hybrid_pack").warning("hybrid_pack cannot be registered: %r", error)
