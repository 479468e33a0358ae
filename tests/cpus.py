"""/proc/cpuinfo feature lines of several CPUs, for tests that run on any machine."""

NEOVERSE_N1 = (
    "Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
)
"""aarch64 without bfloat16: AWS Graviton2, Ampere Altra."""

NEOVERSE_V1 = NEOVERSE_N1 + " sve i8mm bf16"
"""aarch64 with bfloat16: AWS Graviton3."""

HASWELL = "flags\t\t: fpu sse4_2 avx f16c fma avx2 bmi2"
SKYLAKE_SERVER = HASWELL + " avx512f avx512dq avx512cd avx512bw avx512vl"
SAPPHIRE_RAPIDS = SKYLAKE_SERVER + " avx512_bf16 amx_bf16 amx_tile amx_int8"
SIERRA_FOREST = HASWELL + " avx_vnni avx_vnni_int8 avx_ne_convert"
