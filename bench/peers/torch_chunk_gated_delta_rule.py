"""Times Transformers' torch_chunk_gated_delta_rule for `hcp bench gdn --peer hf`.

Reads one JSON request a line, writes one JSON answer a line:
  {"op": "start", "threads": 1}                        -> {"versions": "..."}
  {"op": "set_up", "tokens": ..., "dtype": "bf16", "device": "cpu", ...} -> {"ok": true}
  {"op": "run"} -> {"forward_us": ..., "backward_us": ..., "peak_bytes": ...}
Any answer may be {"error": "..."} instead.
"""

import ctypes
import gc
import json
import sys
import time


class Peer:
    def start(self, request):
        import torch
        import transformers

        try:
            from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
        except ImportError:
            from transformers.models.qwen3_next import modeling_qwen3_next as modeling
        self.torch = torch
        self.rule = modeling.torch_chunk_gated_delta_rule
        torch.set_num_threads(request["threads"])
        self.threads = request["threads"]
        return {"versions": f"transformers {transformers.__version__}, torch {torch.__version__}"}

    def clock(self):
        if self.on_gpu:
            self.torch.cuda.synchronize()
            return time.perf_counter()
        # As the caller measures itself: other work on the machine does not count.
        return time.process_time() if self.threads == 1 else time.perf_counter()

    def memory(self, **which):
        if not self.on_gpu:
            return resident_bytes(**which)
        cuda = self.torch.cuda
        if which.get("reset_peak"):
            cuda.reset_peak_memory_stats()
        return cuda.max_memory_allocated() if which.get("peak") else cuda.memory_allocated()

    def set_up(self, request):
        self.on_gpu = request["device"] == "cuda"
        self.inputs = self.make_inputs(request, min(request["tokens"], 512))
        self.bytes_before = 0
        self.run(request)
        self.inputs = None
        self.inputs = self.make_inputs(request, request["tokens"])
        release_free_memory()
        self.bytes_before = self.memory()
        return {"ok": True}

    def make_inputs(self, request, tokens):
        torch = self.torch
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[request["dtype"]]
        torch.manual_seed(17)
        self.group = request["value_heads"] // request["key_heads"]

        def noise(heads, dim):
            return torch.randn(1, tokens, heads, dim).to(dtype)

        gates = torch.nn.functional.logsigmoid(torch.randn(1, tokens, request["value_heads"])) / 16
        inputs = {
            "query": noise(request["key_heads"], request["key_dim"]),
            "key": noise(request["key_heads"], request["key_dim"]),
            "value": noise(request["value_heads"], request["value_dim"]),
            "g": gates,
            "beta": torch.rand(1, tokens, request["value_heads"]).to(dtype),
        }
        device = request["device"]
        self.output_gradient = noise(request["value_heads"], request["value_dim"]).to(device)
        return {name: x.to(device).requires_grad_(True) for name, x in inputs.items()}

    def run(self, request):
        torch = self.torch
        gc.collect()
        self.memory(reset_peak=True)
        start = self.clock()
        # The op wants a query and a key head for each value head: so does its model.
        repeated = {
            name: self.inputs[name].repeat_interleave(self.group, dim=2)
            if self.group > 1
            else self.inputs[name]
            for name in ("query", "key")
        }
        output, _ = self.rule(
            repeated["query"],
            repeated["key"],
            self.inputs["value"],
            g=self.inputs["g"],
            beta=self.inputs["beta"],
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
        )
        middle = self.clock()
        answer = {"forward_us": (middle - start) * 1e6}
        if request.get("backward", True):
            torch.autograd.grad(output, list(self.inputs.values()), self.output_gradient)
            answer["backward_us"] = (self.clock() - middle) * 1e6
        answer["peak_bytes"] = self.memory(peak=True) - self.bytes_before
        return answer


def release_free_memory():
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass


def resident_bytes(peak=False, reset_peak=False):
    """Of this process, as Linux counts it; 0 where it does not."""
    try:
        if reset_peak:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:" if peak else "VmRSS:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def main():
    peer = Peer()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(peer, request["op"])(request)
        except Exception as error:  # the caller says it in one line
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), flush=True)


main()
