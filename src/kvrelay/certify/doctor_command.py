"""``kvrelay doctor``."""

from __future__ import annotations

import click

from kvrelay.cli.options import json_option


@click.command("doctor")
@json_option
def doctor_command(as_json: bool) -> int:
    """Look, in seconds and without a model, what this machine has for prefill and decode apart: what is, what it means,
    what to do. Exit code 1 if something will not work. The report has no secrets.

    Example: kvrelay doctor --json > doctor.json
    """
    from kvrelay.bench.report.files import print_result
    from kvrelay.certify.doctor import diagnose, text_of

    diagnosis = diagnose()
    print_result(diagnosis, text_of(diagnosis), as_json)
    return diagnosis.exit_code
