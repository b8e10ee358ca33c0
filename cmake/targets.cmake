# One library a folder of src/ (docs/architecture.md). hcp_library(core SOURCES a.cpp LIBRARIES ...) makes the
# target hcp_core; TORCH gives it libtorch and the shared precompiled header. tools/check_layers.py, part of
# make lint, refuses an include of a folder that LIBRARIES does not reach.
add_library(hcp_options INTERFACE)
# -fPIC for every target alike: executables must not differ (-fPIE) or they could not share the precompiled header.
target_compile_options(hcp_options INTERFACE -fPIC -Wall -Wextra -Wshadow -Wconversion
    $<$<BOOL:${HCP_WERROR}>:-Werror>)
# HCP_SANITIZE=address,undefined or thread (CMakePresets.json): libtorch itself is not instrumented.
if(HCP_SANITIZE)
    target_compile_options(hcp_options INTERFACE -fsanitize=${HCP_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(hcp_options INTERFACE -fsanitize=${HCP_SANITIZE})
endif()
target_include_directories(hcp_options INTERFACE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
# Header only: torch brings an fmt of its own in its include folder, of another version than the system's library.
target_link_libraries(hcp_options INTERFACE Threads::Threads fmt::fmt-header-only)

add_library(hcp_torch INTERFACE)
target_link_libraries(hcp_torch INTERFACE torch::torch_cpu $<$<BOOL:${HCP_CUDA}>:torch::torch_cuda>)
target_include_directories(hcp_torch SYSTEM INTERFACE "${HCP_GLOO_INCLUDE}")
target_compile_definitions(hcp_torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO $<$<BOOL:${HCP_CUDA}>:HCP_CUDA>)
target_link_options(hcp_torch INTERFACE "LINKER:--disable-new-dtags")
list(JOIN HCP_TORCH_RUNTIME_DIRS ":" _hcp_rpath)
target_link_options(hcp_torch INTERFACE "LINKER:-rpath,${_hcp_rpath}" "LINKER:-rpath-link,${_hcp_rpath}")

# The one precompiled header: ATen, autograd's custom functions, fmt and the standard containers.
add_library(hcp_precompiled OBJECT "${PROJECT_SOURCE_DIR}/cmake/precompiled.cpp")
target_link_libraries(hcp_precompiled PRIVATE hcp_options hcp_torch)
target_precompile_headers(hcp_precompiled PRIVATE "${PROJECT_SOURCE_DIR}/cmake/precompiled.h")

function(hcp_use_torch target)
    target_link_libraries(${target} PUBLIC hcp_torch)
    target_precompile_headers(${target} REUSE_FROM hcp_precompiled)
endfunction()

function(hcp_library name)
    cmake_parse_arguments(ARG "TORCH" "" "SOURCES;LIBRARIES" ${ARGN})
    add_library(hcp_${name} STATIC ${ARG_SOURCES})
    target_link_libraries(hcp_${name} PUBLIC hcp_options ${ARG_LIBRARIES})
    if(ARG_TORCH)
        hcp_use_torch(hcp_${name})
    endif()
endfunction()

# hcp_isa_sources(kernels conv/conv_kernels.cpp ...) compiles each file once per instruction set into hcp_kernels
# (src/kernels/simd/dispatch.h). No precompiled header: such files include neither torch nor containers.
# -ffp-contract: a * b + c of vectors is one instruction. -Wno-psabi: vectors never cross a file.
set(HCP_ISAS portable)
set(HCP_ISA_FLAGS_portable -DHCP_VECTOR_BYTES=16)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND HCP_ISAS avx2 avx512 avx512_bf16 amx_bf16)
    # -mtune: registers and order only. For its generic CPU g++ 13 leaves the multiply-adds of a chain in a loop apart
    # (avoid_256fma_chains), so that a channel's bits would depend on its place; and GCC 12 is 1 to 4 % slower on Zen 5.
    set(HCP_ISA_FLAGS_avx2 -mavx2 -mfma -mtune=haswell -DHCP_VECTOR_BYTES=32)
    set(HCP_ISA_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mtune=icelake-server
        -DHCP_VECTOR_BYTES=64)
    set(HCP_ISA_FLAGS_avx512_bf16 ${HCP_ISA_FLAGS_avx512} -mavx512bf16)
    set(HCP_ISA_FLAGS_amx_bf16 ${HCP_ISA_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16)
endif()
function(hcp_isa_sources name)
    foreach(_isa IN LISTS HCP_ISAS)
        add_library(hcp_${name}_${_isa} OBJECT ${ARGN})
        target_link_libraries(hcp_${name}_${_isa} PRIVATE hcp_options)
        target_compile_options(hcp_${name}_${_isa} PRIVATE -O3 -ffp-contract=fast -fno-math-errno -Wno-psabi
            ${HCP_ISA_FLAGS_${_isa}} -DHCP_ISA=${_isa})
        target_sources(hcp_${name} PRIVATE $<TARGET_OBJECTS:hcp_${name}_${_isa}>)
    endforeach()
endfunction()

# hcp_test(layout_test LABELS unit LIBRARIES hcp_layout [TORCH]) in tests/layout: layout_test.cpp, run by ctest. MAIN: another
# file than that.
function(hcp_test path)
    cmake_parse_arguments(ARG "TORCH" "TIMEOUT;MAIN" "LABELS;LIBRARIES;SOURCES" ${ARGN})
    get_filename_component(_name ${path} NAME)
    if(NOT ARG_TIMEOUT)
        set(ARG_TIMEOUT 300)
    endif()
    if(NOT ARG_MAIN)
        set(ARG_MAIN ${path}.cpp)
    endif()
    add_executable(${_name} ${ARG_MAIN} ${ARG_SOURCES})
    target_link_libraries(${_name} PRIVATE hcp_options ${ARG_LIBRARIES} GTest::gtest GTest::gtest_main)
    target_include_directories(${_name} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
    target_compile_definitions(${_name} PRIVATE
        HCP_GOLDEN_DIR="${PROJECT_SOURCE_DIR}/tests/golden" HCP_BINARY="$<TARGET_FILE:hcp>")
    if(ARG_TORCH)
        hcp_use_torch(${_name})
    endif()
    add_test(NAME ${_name} COMMAND ${_name} WORKING_DIRECTORY "${PROJECT_BINARY_DIR}")
    set_tests_properties(${_name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
        ENVIRONMENT "OMP_NUM_THREADS=1")
endfunction()
