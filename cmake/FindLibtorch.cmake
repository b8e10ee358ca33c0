# Finds the C++ part of a torch wheel (or a libtorch archive) without asking for a CUDA toolkit, as torch's
# own package does. Searched: HCP_LIBTORCH (CMake or environment variable: the folder that holds include/ and
# lib/), then the tree's own .deps folder. Targets: torch::c10, torch::torch_cpu and, where it has them,
# torch::c10_cuda, torch::torch_cuda.
if(NOT HCP_LIBTORCH AND DEFINED ENV{HCP_LIBTORCH})
    set(HCP_LIBTORCH "$ENV{HCP_LIBTORCH}")
endif()
if(NOT HCP_LIBTORCH)
    file(GLOB _hcp_torch_candidates "${PROJECT_SOURCE_DIR}/.deps/python/lib/python3*/site-packages/torch")
    list(APPEND _hcp_torch_candidates "")
    list(GET _hcp_torch_candidates 0 HCP_LIBTORCH)
endif()
if(NOT EXISTS "${HCP_LIBTORCH}/include/ATen/core/Tensor.h")
    message(FATAL_ERROR "libtorch not found (looked in '${HCP_LIBTORCH}'): run 'make setup', or set HCP_LIBTORCH "
                        "to the folder that holds torch's include/ and lib/")
endif()
file(STRINGS "${PROJECT_SOURCE_DIR}/tools/requirements.txt" _hcp_torch_pin REGEX "^torch==")
string(REPLACE "torch==" "" _hcp_torch_pin "${_hcp_torch_pin}")
file(READ "${HCP_LIBTORCH}/include/torch/headeronly/version.h" _hcp_torch_version)
if(NOT _hcp_torch_version MATCHES "\"${_hcp_torch_pin}\"")
    message(FATAL_ERROR "the libtorch in ${HCP_LIBTORCH} is not ${_hcp_torch_pin}: run 'make setup' without "
                        "HCP_LIBTORCH, or set HCP_LIBTORCH to a libtorch ${_hcp_torch_pin}")
endif()
set(HCP_LIBTORCH "${HCP_LIBTORCH}" CACHE PATH "folder that holds torch's include/ and lib/" FORCE)

# torch_cpu needs two small CUDA libraries at load time: from the wheels beside torch, or from a toolkit.
set(HCP_TORCH_RUNTIME_DIRS "${HCP_LIBTORCH}/lib")
foreach(_dir IN ITEMS "${HCP_LIBTORCH}/../nvidia/cu13/lib" "${HCP_LIBTORCH}/../nvidia/nccl/lib"
                      /usr/local/cuda/lib64 /usr/local/cuda/extras/CUPTI/lib64)
    if(EXISTS "${_dir}")
        get_filename_component(_dir "${_dir}" REALPATH)
        list(APPEND HCP_TORCH_RUNTIME_DIRS "${_dir}")
    endif()
endforeach()

function(_hcp_import_torch name)
    set(_file "${HCP_LIBTORCH}/lib/lib${name}.so")
    if(NOT EXISTS "${_file}")
        message(FATAL_ERROR "libtorch at ${HCP_LIBTORCH} has no lib${name}.so: the wheel torch==2.11.0 has it")
    endif()
    if(NOT TARGET torch::${name})
        add_library(torch::${name} SHARED IMPORTED GLOBAL)
        set_target_properties(torch::${name} PROPERTIES
            IMPORTED_LOCATION "${_file}"
            INTERFACE_INCLUDE_DIRECTORIES  # of an imported target: system headers, so without our warnings
            "${HCP_LIBTORCH}/include;${HCP_LIBTORCH}/include/torch/csrc/api/include")
    endif()
endfunction()
_hcp_import_torch(c10)
_hcp_import_torch(torch_cpu)
target_link_libraries(torch::torch_cpu INTERFACE torch::c10)
if(HCP_CUDA OR EXISTS "${HCP_LIBTORCH}/lib/libtorch_cuda.so")
    _hcp_import_torch(c10_cuda)
    _hcp_import_torch(torch_cuda)
    target_link_libraries(torch::torch_cuda INTERFACE torch::torch_cpu torch::c10_cuda)
endif()
set(Libtorch_FOUND TRUE)
