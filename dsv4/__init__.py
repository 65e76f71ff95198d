"""DeepSeek-V4 on the workspace interface: configs, scratch layouts, stream topology, scheduler, traces.

Facts come from vLLM 0.26-0.29 (``vllm/models/deepseek_v4``) and the published ``config.json`` files; each
module names what it took. Nothing here reaches into `workspace` beyond its public interface.
"""
