"""Former name of `sd_ort.integrations.webui.extension`."""

from sd_ort.integrations.webui.extension import hook as hook
