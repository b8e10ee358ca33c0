# nvcc for the .cu files, from the toolkit or from the wheels beside torch; sets HCP_NVCC, HCP_CUDA_INCLUDE, HCP_CUDART.
# Not CMake's CUDA language: its compiler checks want a whole toolkit.
get_filename_component(_hcp_wheels "${HCP_LIBTORCH}/../nvidia/cu13" ABSOLUTE)
find_program(HCP_NVCC nvcc HINTS /usr/local/cuda/bin "${_hcp_wheels}/bin")
find_path(HCP_CUDA_INCLUDE cuda_runtime_api.h HINTS "${_hcp_wheels}/include" /usr/local/cuda/include)
find_library(HCP_CUDART NAMES cudart libcudart.so.13 HINTS /usr/local/cuda/lib64 "${_hcp_wheels}/lib")
if(HCP_CUDA AND NOT (HCP_NVCC AND HCP_CUDA_INCLUDE AND HCP_CUDART))
    message(FATAL_ERROR "HCP_CUDA=ON needs nvcc, the CUDA headers and libcudart (found: '${HCP_NVCC}', "
                        "'${HCP_CUDA_INCLUDE}', '${HCP_CUDART}'): put a CUDA 13 toolkit's bin on PATH, or configure "
                        "with HCP_CUDA=OFF")
endif()
if(HCP_CUDA)
    target_include_directories(hcp_torch SYSTEM INTERFACE "${HCP_CUDA_INCLUDE}")
endif()
if(NOT HCP_NVCC)
    message(STATUS "no nvcc: the CUDA kernels are not compiled")
endif()

# hcp_cuda_objects(RESULT OPERANDS a.cu ...) compiles each file for Hopper with -DHCP_OPERANDS=...; adds the objects to RESULT.
function(hcp_cuda_objects result operands)
    set(_objects ${${result}})
    set(_racecheck)
    if(HCP_RACECHECK)
        set(_racecheck -DHCP_RACECHECK)
    endif()
    foreach(_source IN LISTS ARGN)
        set(_object "${CMAKE_CURRENT_BINARY_DIR}/${_source}.${operands}.o")
        get_filename_component(_folder "${_object}" DIRECTORY)
        file(MAKE_DIRECTORY "${_folder}")
        add_custom_command(OUTPUT "${_object}"
            COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} "${HCP_NVCC}" -O3 -std=c++20 --expt-relaxed-constexpr -lineinfo
                --generate-code=arch=compute_90a,code=sm_90a -Werror all-warnings -Xcompiler=-fPIC,-Wall
                -DHCP_OPERANDS=${operands} ${_racecheck} -ccbin "${CMAKE_CXX_COMPILER}" -I "${PROJECT_SOURCE_DIR}/src" -isystem "${HCP_CUDA_INCLUDE}"
                -MD -MF "${_object}.d" -c "${CMAKE_CURRENT_SOURCE_DIR}/${_source}" -o "${_object}"
            DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/${_source}" DEPFILE "${_object}.d" VERBATIM
            COMMENT "Compiling ${_source} for sm_90a (${operands})")
        set_source_files_properties("${_object}" PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
        list(APPEND _objects "${_object}")
    endforeach()
    set(${result} "${_objects}" PARENT_SCOPE)
endfunction()
