# The extension module mlx_mtp._ext and what is installed with it.

if(NOT MLX_ROOT)
  message(FATAL_ERROR "The Python extension needs the MLX of a Python package.")
endif()

# Development.Module only: with SABIModule nanobind would switch to the stable
# ABI, whose internals key mlx.core does not share.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

if(NOT nanobind_ROOT)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
    OUTPUT_STRIP_TRAILING_WHITESPACE
    OUTPUT_VARIABLE nanobind_ROOT COMMAND_ERROR_IS_FATAL ANY)
endif()
find_package(nanobind CONFIG REQUIRED)

include(cmake/check_nanobind_key.cmake)
check_nanobind_key("${MLX_ROOT}" "${nanobind_DIR}" "${nanobind_VERSION}")

# Read before _ext is loaded: against another mlx, loading it may fail with
# nothing but a missing symbol.
file(READ "${MLX_ROOT}/include/mlx/version.h" mlx_version_h)
foreach(part MAJOR MINOR PATCH)
  string(REGEX MATCH "VERSION_${part} ([0-9]+)" _ "${mlx_version_h}")
  list(APPEND mlx_version ${CMAKE_MATCH_1})
endforeach()
list(JOIN mlx_version "." mlx_version)
file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/_build.py"
     "mlx_version = \"${mlx_version}\"\n")

if(MLX_MTP_LTO)
  set(lto LTO)
endif()
nanobind_add_module(_ext NB_STATIC ${lto} NOMINSIZE NB_DOMAIN mlx
                    csrc/bindings.cpp csrc/recordings.cpp)
target_include_directories(_ext PRIVATE csrc)
target_link_libraries(_ext PRIVATE mlx_mtp_ops)

# libmlx is never copied into the wheel: it is found in the sibling mlx package.
if(APPLE)
  set_target_properties(_ext PROPERTIES INSTALL_RPATH "@loader_path/../mlx/lib")
else()
  set_target_properties(_ext PROPERTIES INSTALL_RPATH "$ORIGIN/../mlx/lib")
endif()

if(NOT CMAKE_CROSSCOMPILING)
  nanobind_add_stub(
    _ext_stub
    MODULE _ext
    PYTHON_PATH "$<TARGET_FILE_DIR:_ext>"
    DEPENDS _ext
    OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/_ext.pyi")
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/_ext.pyi"
          DESTINATION mlx_mtp COMPONENT python)
endif()

install(TARGETS _ext LIBRARY DESTINATION mlx_mtp COMPONENT python)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/_build.py"
        DESTINATION mlx_mtp COMPONENT python)
install(FILES csrc/ops.h DESTINATION mlx_mtp/include/mlx_mtp COMPONENT python)
