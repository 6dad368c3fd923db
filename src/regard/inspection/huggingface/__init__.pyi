from regard.inspection.huggingface.attention import check as check
from regard.inspection.huggingface.attention import disable as disable
from regard.inspection.huggingface.attention import enable as enable
from regard.inspection.huggingface.attention import pack as pack
from regard.inspection.huggingface.attention import quantized_cache as quantized_cache
from regard.inspection.huggingface.attention import unpack as unpack
