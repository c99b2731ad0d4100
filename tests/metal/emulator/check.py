"""The static check of kernel text: address spaces, language level, forbidden things."""

import re
import subprocess
from pathlib import Path

from emulator import HERE, clang

# C++ for OpenCL: native address spaces, no double, no virtual functions, no exceptions.
FRONT_END = [
    "-x",
    "clcpp",
    "-cl-std=clc++2021",
    "-cl-no-stdinc",
    "-target",
    "spir64-unknown-unknown",
    "-fsyntax-only",
    "-Xclang",
    "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wdouble-promotion",
    "-Wvla",
    "-Wno-unused-parameter",
    "-Wno-unused-function",
    "-Wno-undefined-internal",
    "-Wno-undefined-inline",
]
# Metal is C++14.
LANGUAGE = [
    "-x",
    "c++",
    "-std=c++14",
    "-fsyntax-only",
    "-Werror=c++17-extensions",
    "-Wno-c++17-attribute-extensions",
    "-Wno-unknown-attributes",
]
# What neither front end refuses.
FORBIDDEN = {
    "character outside ASCII": r"[^\x00-\x7f]",
    "lambda": r"\[[&=]?\]\s*[({]",
    "goto": r"\bgoto\b",
    "std or system header": r"\bstd::|#include\s*<(?!metal_stdlib>)",
    "double literal": r"(?<![\w.])\d+\.\d*(?:e[+-]?\d+)?(?![\w.])",
    "kernel that returns a value": r"\bkernel\s+(?!void\b)\w+",
    "static or thread_local variable": r"\b(?:static|thread_local)\s",
    "threadgroup memory without TG_ARRAY": r"^(?!#define)[^\n]*"
    r"\bthreadgroup\s+\w+\s+\w+\s*\[",
    "function without METAL_FUNC": r"^(?!METAL_FUNC|kernel|template|struct|constant"
    r"|using|#|//|instantiate)\w[\w<>:*& ]*\(",
    "memory order other than relaxed": r"memory_order_(?!relaxed)",
    "math without metal::": r"(?<![\w:])"
    r"(?:exp|log|exp2|log2|sqrt|floor|ceil|max|min|clamp|fma)\s*\(",
    "function constant": r"function_constant",
    "function named like a type of Metal": r"(?<![\w.:])"
    r"(?:filter|sampler|address|coord|access|component)\s*\(",
    "constant that is not constexpr": r"^constant (?!constexpr )",
    "pointer or reference without address space": r"(?<!device )(?<!threadgroup )"
    r"(?<!thread )(?<!constant )(?<!const )"
    r"\b(?:float|half|bfloat|u?int|ulong|ushort|uchar|[A-Z]\w*)"
    r"\s*[*&]\s*\w+\s*[,)=;\[]",
}


def lint(text):
    """Names of the rules that a text breaks."""
    body = re.sub(r"//.*", "", text)
    body = re.sub(r"(METAL_FUNC[^\n(]*)\n", r"\1 ", body)
    found = [name for name, rule in FORBIDDEN.items() if re.search(rule, body, re.M)]
    for arguments in re.findall(r"kernel void \w+\s*\((.*?)\)\s*\{", body, re.S):
        indices = re.findall(r"buffer\((\d+)\)", arguments)
        if len(indices) != len(set(indices)):
            found.append("buffer index used twice")
        for argument in re.split(r",(?![^\[]*\])", arguments):
            if "[[" not in argument:
                found.append("kernel argument without attribute")
            elif "buffer(" in argument and not re.search("device|constant", argument):
                found.append("buffer without address space")
        shapes = re.findall(
            r"(\w+) \w+ \[\[thread\w*_(?:in_grid|per_\w+)\]\]", arguments
        )
        if len(set(shapes)) > 1:
            found.append("positions and sizes of different shapes")
    depth = 0
    for line in body.splitlines():
        if "TG_ARRAY(" in line and depth > 1 and "#define" not in line:
            found.append("TG_ARRAY inside a block")
        depth += line.count("{") - line.count("}")
    return found


def front_ends(path, include):
    """Error output of clang for a .metal file, with address spaces and as C++14."""
    errors = ""
    for flags, stand_in in [(FRONT_END, "check"), (LANGUAGE, "run")]:
        folders = [f"-I{folder}" for folder in (HERE / stand_in, HERE, *include)]
        command = [clang(), *flags, *folders, str(path)]
        errors += subprocess.run(command, capture_output=True, text=True).stderr
    return errors


def unqualified(path, include):
    """Declarations of pointers and references that have no address space of their own,
    which the front end silently takes for generic ones."""
    folders = [f"-I{folder}" for folder in (HERE / "check", *include)]
    command = [clang(), *FRONT_END, *folders, "-Xclang", "-ast-dump", str(path)]
    dump = subprocess.run(command, capture_output=True, text=True).stdout
    found = []
    in_project = False
    for line in dump.splitlines():
        # The last file that a range names: the first is where a macro comes from.
        files = re.findall(r"[<,] ?(?:[^<>,]*/)?([\w.]+):\d+:\d+", line)
        if files and "Decl 0x" in line:
            in_project = files[-1] != "metal_stdlib"
        if (
            in_project
            and re.search(r"(ParmVarDecl|VarDecl|FieldDecl) ", line)
            # Arguments of implicit constructors have no name.
            and (match := re.search(r"\s(\w+) '[^']*__generic [^']*[*&]", line))
            and match[1] != "used"
        ):
            found.append(line.strip(" |`-"))
    return found


def check(path, include):
    """Everything that is wrong with a .metal file and the headers beside it."""
    texts = [Path(path), *(h for folder in include for h in Path(folder).glob("*.h"))]
    found = [
        f"{text.name}: {rule}" for text in texts for rule in lint(text.read_text())
    ]
    errors = front_ends(path, include)
    return found + ([errors] if errors else unqualified(path, include))
