# Sets MLX_MTP_MLX, the target of MLX to link with.

# A project that has MLX already shares it; two copies would not mix.
if(TARGET mlx)
  set(MLX_MTP_MLX mlx)
  return()
endif()

# find_spec rather than `python -m mlx --cmake-dir`: the latter imports mlx.core,
# which needs a GPU driver with the CUDA wheel and a Mac in cross builds.
if(NOT MLX_ROOT)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
    "import importlib.util as u, os; print(next(p for p in u.find_spec('mlx').submodule_search_locations if os.path.isdir(p + '/include/mlx')))"
    OUTPUT_STRIP_TRAILING_WHITESPACE
    OUTPUT_VARIABLE MLX_ROOT COMMAND_ERROR_IS_FATAL ANY)
endif()

# An own imported target: find_package(MLX) wants a CUDA toolkit with the CUDA
# wheel and carries the paths of Apple's build machine with the Metal wheel.
if(APPLE)
  set(mlx_library "${MLX_ROOT}/lib/libmlx.dylib")
else()
  set(mlx_library "${MLX_ROOT}/lib/libmlx.so")
endif()
add_library(mlx_imported SHARED IMPORTED)
set_target_properties(
  mlx_imported PROPERTIES IMPORTED_LOCATION "${mlx_library}"
                          INTERFACE_INCLUDE_DIRECTORIES "${MLX_ROOT}/include")
if(APPLE)
  set_property(
    TARGET mlx_imported APPEND PROPERTY INTERFACE_INCLUDE_DIRECTORIES
                                        "${MLX_ROOT}/include/metal_cpp")
endif()
set(MLX_MTP_MLX mlx_imported)
