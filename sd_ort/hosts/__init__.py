"""Former name of `sd_ort.integrations`: files that earlier versions installed into applications import from here."""
