"""gradlift in the trainers people already use, one module each, imported only when asked for.

``lightning`` has a precision plugin for Trainer and Fabric, ``accelerate`` puts a scaler into an
``Accelerator``, ``transformers`` into the Hugging Face ``Trainer``. Importing one changes nothing
in the library it serves. Where a method of that library must be replaced it is replaced on one
object, put back on exit, and only for versions that were looked at (``overrides.py``).
"""
