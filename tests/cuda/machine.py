"""Launches the kernel text on an NVIDIA GPU, without MLX: what ``emulator.Emulator`` is
on a CPU. It needs the driver, NVRTC and CMake, nothing else.

    Machine().launch("name", (61,), (256,), {0: x, 11: params})
"""

import ctypes
import re
import statistics
import subprocess
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
OPS = ("commit_rows", "gated_delta_replay", "sample", "verify_coupled", "verify_draft")


class Arguments(ctypes.Structure):
    """As in csrc/cuda/metal_stdlib.h."""

    _fields_ = [("buffers", ctypes.c_void_p * 24), ("bytes", ctypes.c_char * 192)]


def kernel_texts():
    """The texts that the build embeds, by name."""
    sources = [ROOT / "metal" / f"{op}.metal" for op in OPS]
    sources.append(ROOT / "csrc" / "cuda" / "metal_stdlib.h")
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder) / "kernels.h"
        paths = ";".join(map(str, sources))
        script = ROOT / "cmake" / "embed.cmake"
        options = [f"-Dheader={header}", f"-Dsources={paths}", "-Ddirs="]
        subprocess.run(["cmake", *options, "-P", script], check=True)
        text = header.read_text()
    found = re.findall(r'KernelSource (\w+) =.*?R"kernel\((.*?)\)kernel"', text, re.S)
    return dict(found)


def compile_kernel(texts, name, architecture="sm_90"):
    """The machine code of one kernel, with the options of csrc/cuda/compile.cpp."""
    nvrtc = ctypes.CDLL("libnvrtc.so.13")
    op = next(op for op in OPS if name.startswith(op))
    text = f"{texts[op]}\ncompile_kernel({name})\n".encode()
    header = (ctypes.c_char_p * 1)(texts["metal_stdlib"].encode())
    header_name = (ctypes.c_char_p * 1)(b"metal_stdlib")
    program = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text, op.encode(), 1, header, header_name
    )
    assert created == 0
    options = [f"--gpu-architecture={architecture}", "--std=c++20", "--fmad=false"]
    encoded = (ctypes.c_char_p * 3)(*(x.encode() for x in options))
    failed = nvrtc.nvrtcCompileProgram(program, 3, encoded)
    kind = "ProgramLog" if failed else "CUBIN"
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    out = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, out)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(out.value.decode())
    return out.raw


def root_of(x):
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


class Machine:
    def __init__(self):
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._texts = kernel_texts()
        self._functions = {}
        context, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.call("cuStreamCreate", ctypes.byref(self.stream), 1)

    def call(self, name, *args):
        error = getattr(self._cuda, name)(*args)
        if error:
            raise RuntimeError(f"{name}: CUDA error {error}")

    def function(self, name):
        if name not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            code = compile_kernel(self._texts, name)
            self.call("cuModuleLoadData", ctypes.byref(module), code)
            self.call(
                "cuModuleGetFunction", ctypes.byref(function), module, name.encode()
            )
            self._functions[name] = function
        return self._functions[name]

    def encode(self, memory, kernel, grid, threads, buffers):
        """Launches on the stream, with arrays that ``memory`` holds."""
        arguments = Arguments()
        arrays = [x for _, x in sorted(buffers.items()) if isinstance(x, np.ndarray)]
        for i, x in enumerate(arrays):
            arguments.buffers[i] = memory.address(x)
        for x in buffers.values():
            if isinstance(x, ctypes.Structure):
                ctypes.memmove(
                    ctypes.addressof(arguments) + Arguments.bytes.offset,
                    ctypes.addressof(x),
                    ctypes.sizeof(x),
                )
        packed = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        sizes = [*(*grid, 1, 1)[:3], *(*threads, 1, 1)[:3]]
        self.call(
            "cuLaunchKernel",
            self.function(kernel),
            *sizes,
            0,
            self.stream,
            packed,
            None,
        )

    def launch(self, kernel, grid, threads, buffers, seed=0):
        buffers = used(kernel, buffers)
        memory = Memory(self)
        try:
            self.encode(memory, kernel, grid, threads, buffers)
            self.call("cuStreamSynchronize", self.stream)
            memory.download()
        finally:
            memory.free()


def used(kernel, buffers):
    """The buffers that a kernel names in its signature; the text has no gaps."""
    return {i: x for i, x in buffers.items() if i in SIGNATURES[function_of(kernel)]}


def function_of(kernel):
    return next(x for x in sorted(SIGNATURES, key=len)[::-1] if kernel.startswith(x))


def signatures():
    """The buffer indices of every kernel function."""
    found = {}
    for path in (ROOT / "metal").glob("*.h"):
        for name, arguments in re.findall(
            r"^kernel void (\w+)\((.*?)\) \{", path.read_text(), re.M | re.S
        ):
            found[name] = [int(i) for i in re.findall(r"buffer\((\d+)\)", arguments)]
    return found


SIGNATURES = signatures()


class Memory:
    """Copies of NumPy arrays on the GPU; views of one array share one copy."""

    def __init__(self, machine):
        self._machine = machine
        self._copies = {}

    def address(self, x):
        root = root_of(x)
        key = root.ctypes.data
        if key not in self._copies:
            start = ctypes.c_void_p()
            self._machine.call(
                "cuMemAlloc_v2", ctypes.byref(start), ctypes.c_size_t(root.nbytes + 256)
            )
            # Rows are aligned on the GPU as they are here.
            at = start.value + key % 256
            self._machine.call(
                "cuMemcpyHtoD_v2",
                ctypes.c_uint64(at),
                ctypes.c_void_p(key),
                ctypes.c_size_t(root.nbytes),
            )
            # The copy of pageable memory may go on behind the call.
            self._machine.call("cuStreamSynchronize", None)
            self._copies[key] = (root, start.value, at)
        return self._copies[key][2] + x.ctypes.data - key

    def download(self):
        for key, (root, _, at) in self._copies.items():
            if root.flags.writeable:
                self._machine.call(
                    "cuMemcpyDtoH_v2",
                    ctypes.c_void_p(key),
                    ctypes.c_uint64(at),
                    ctypes.c_size_t(root.nbytes),
                )

    def free(self):
        for _, start, _ in self._copies.values():
            self._machine.call("cuMemFree_v2", ctypes.c_uint64(start))
        self._copies.clear()


class Graph:
    """A CUDA graph of what ``encode`` launches."""

    def __init__(self, machine, encode):
        self._machine = machine
        graph, self._graph = ctypes.c_void_p(), ctypes.c_void_p()
        stream = machine.stream
        machine.call("cuStreamSynchronize", stream)
        machine.call("cuStreamBeginCapture_v2", stream, 1)
        encode()
        machine.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        machine.call(
            "cuGraphInstantiateWithFlags",
            ctypes.byref(self._graph),
            graph,
            ctypes.c_uint64(0),
        )

    def seconds(self, repeats=25):
        """The times of replays."""
        call, stream = self._machine.call, self._machine.stream
        events = [ctypes.c_void_p() for _ in range(2)]
        for event in events:
            call("cuEventCreate", ctypes.byref(event), 0)
        times = []
        for _ in range(repeats + 3):
            call("cuEventRecord", events[0], stream)
            call("cuGraphLaunch", self._graph, stream)
            call("cuEventRecord", events[1], stream)
            call("cuStreamSynchronize", stream)
            ms = ctypes.c_float()
            call("cuEventElapsedTime", ctypes.byref(ms), *events)
            times.append(ms.value / 1000)
        return times[3:]

    def median(self):
        return statistics.median(self.seconds())
