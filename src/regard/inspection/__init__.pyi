from regard.inspection.statistics import HeadStatistics as HeadStatistics
from regard.inspection.statistics import head_statistics as head_statistics
