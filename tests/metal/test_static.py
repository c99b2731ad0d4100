"""The static check: our kernels pass, and every kind of mistake is found."""

import check
import host
import pytest

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
BODY = (
    HEAD
    + "kernel void k(device float* a [[buffer(0)]], constant int& n [[buffer(1)]],"
    + " uint i [[thread_position_in_grid]]) {\n  %s\n}\n"
)
HELPER = HEAD + "METAL_FUNC float f(%s) { return %s; }\n"
KERNEL = HEAD + "kernel void k(%s) {\n  %s\n}\n"
INDEX = "uint i [[thread_position_in_grid]]"
WRONG = {
    "device pointer as threadgroup": BODY % "threadgroup float* p = a; p[0] = 1.0f;",
    "generic pointer": HELPER % ("float* p", "p[0]"),
    "generic reference": HELPER % ("const float& p", "p"),
    "write to constant": BODY % "n = 3; a[i] = 0.0f;",
    "double": BODY % "double x = 1.0f; a[i] = float(x);",
    "double literal": BODY % "a[i] = a[i] * 1.5;",
    "function pointer": HELPER % ("float x", "x")
    + KERNEL % (f"device float* a [[buffer(0)]], {INDEX}", "auto p = f; a[i] = p(1);"),
    "virtual": HEAD + "struct S { virtual float f() { return 1.0f; } };\n",
    "new": BODY % "auto p = new float[4]; a[i] = p[0];",
    "throw": BODY % "if (n < 0) { throw 1; } a[i] = 0.0f;",
    "lambda": BODY % "auto f = [](float x) { return x; }; a[i] = f(1.0f);",
    "goto": BODY % "if (n < 0) { goto e; } a[i] = 0.0f; e: return;",
    "variable length array": BODY % "float t[n]; t[0] = 1.0f; a[i] = t[0];",
    "system header": HEAD + "#include <vector>\n",
    "std": BODY % "a[i] = std::max(a[i], 1.0f);",
    "mutable global": HEAD + "int counter = 0;\n",
    "static local": BODY % "static int c = 0; c += 1; a[i] = float(c);",
    "vector conversion": BODY % "float4 x = {1, 2, 3, 4}; half4 y = x; a[i] = y.x;",
    "implicit bfloat": KERNEL
    % (f"device bfloat* a [[buffer(0)]], {INDEX}", "a[i] = 1.0f;"),
    "misspelt attribute": KERNEL
    % ("device float* a [[buffer(0)]], uint i [[thread_positon_in_grid]]", ""),
    "no attribute": KERNEL % (f"device float* a, {INDEX}", "a[i] = 1.0f;"),
    "index used twice": KERNEL
    % (f"device float* a [[buffer(0)]], device float* b [[buffer(0)]], {INDEX}", ""),
    "constant by value": KERNEL % (f"int n [[buffer(1)]], {INDEX}", ""),
    "kernel with a result": HEAD + f"kernel int k({INDEX}) {{ return 0; }}\n",
    "raw threadgroup array": BODY % "threadgroup float t[4]; a[i] = t[0];",
    "threadgroup array in a block": BODY
    % "if (n > 0) {\n TG_ARRAY(float, t, 4); a[i] = t[0];\n }",
    "printf": BODY % 'printf("%d", n);',
    "concept": HEAD + "template <class T> concept C = true;\n",
    "if constexpr": BODY % "if constexpr (sizeof(int) == 4) { a[i] = 0.0f; }",
    "strict memory order": BODY % "atomic_load_explicit(a, memory_order_seq_cst);",
    "uninitialised": BODY % "float x; if (n > 0) { x = 1.0f; } a[i] = x;",
    "bare math": BODY % "a[i] = exp(a[i]);",
    "no METAL_FUNC": HEAD + "float f(float x) { return x; }\n",
    "positions of different shapes": KERNEL
    % ("uint2 a [[threadgroup_position_in_grid]], uint n [[threads_per_grid]]", ""),
    "name of a Metal type": HEAD
    + "METAL_FUNC float filter(float x) { return x; }\n"
    + KERNEL % (f"device float* a [[buffer(0)]], {INDEX}", "a[i] = filter(a[i]);"),
    "constant without constexpr": HEAD + "constant int n = 3;\n",
    "not ASCII": HEAD + "constant constexpr float \u03b1 = 1.0f;\n",
    "function constant": HEAD + "constant constexpr bool b [[function_constant(0)]];\n",
}


@pytest.mark.parametrize(
    "path", sorted(host.METAL.glob("*.metal")), ids=lambda path: path.stem
)
def test_our_kernels_pass(path):
    assert check.check(path, [host.METAL]) == []


def test_a_right_kernel_passes(tmp_path):
    path = tmp_path / "k.metal"
    path.write_text(BODY % "a[i] = float(n);")
    assert check.check(path, []) == []


@pytest.mark.parametrize("name", WRONG)
def test_finds(name, tmp_path):
    path = tmp_path / "k.metal"
    path.write_text(WRONG[name])
    assert check.check(path, [])
