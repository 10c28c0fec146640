{{- /* The image with its tag or digest. */ -}}
{{- define "scrubber.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- .Values.image.repository }}{{ hasPrefix "sha256:" $tag | ternary "@" ":" }}{{ $tag }}
{{- end -}}

{{- define "scrubber.deviceListStrategy" -}}
{{- .Values.deviceListStrategy | default (.Values.gpuOperator.enabled | ternary "cdi-annotations,cdi-cri" "volume-mounts") -}}
{{- end -}}

{{- /* Whether devices are passed by CDI without the GPU Operator. */ -}}
{{- define "scrubber.hostCdi" -}}
{{- and (contains "cdi" (include "scrubber.deviceListStrategy" .)) (not .Values.gpuOperator.enabled) -}}
{{- end -}}

{{- /* The node selector of the values; of a group, with its own value of the label. Takes a list: the root, the group. */ -}}
{{- define "scrubber.nodeSelector" -}}
{{- $selector := deepCopy (index . 0).Values.nodeSelector -}}
{{- with index . 1 }}{{ $_ := set $selector "scrubber.dev/node" . }}{{ end -}}
{{- toYaml $selector -}}
{{- end -}}

{{- define "scrubber.affinity" -}}
{{- if .Values.affinity -}}
{{- toYaml .Values.affinity -}}
{{- else if .Values.nfd.enabled -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
    - matchExpressions:
      - {key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}
    - matchExpressions:
      - {key: feature.node.kubernetes.io/cpu-model.vendor_id, operator: In, values: [NVIDIA]}
    - matchExpressions:
      - {key: nvidia.com/gpu.present, operator: In, values: ["true"]}
{{- end -}}
{{- end -}}

{{- /* A list in CEL. */ -}}
{{- define "scrubber.runtimeClasses" -}}
[{{ range $place, $each := .Values.admission.runtimeClasses }}{{ if $place }}, {{ end }}{{ $each | quote }}{{ end }}]
{{- end -}}

{{- /* Rules or a board with another label for clusters, as dashboards/cluster_label.py renames it. Takes a list: the text, the label. */ -}}
{{- define "scrubber.withClusterLabel" -}}
{{- $text := index . 0 -}}
{{- $label := index . 1 -}}
{{- if ne $label "cluster" -}}
{{- $text = regexReplaceAll "\\b(by|on|group_left|group_right) \\(([^()]*\\b)?cluster\\b([^()]*)\\)" $text (printf "${1} (${2}%s${3})" $label) -}}
{{- $text = regexReplaceAll "\\bcluster(=~|!~|!=|=)(\\\\?\")" $text (printf "%s${1}${2}" $label) -}}
{{- $text = regexReplaceAll "(\\$labels|__field\\.labels)\\.cluster\\b" $text (printf "${1}.%s" $label) -}}
{{- $text = replace "{{cluster}}" (printf "{{%s}}" $label) $text -}}
{{- $text = replace ", cluster)\"" (printf ", %s)\"" $label) $text -}}
{{- $text = regexReplaceAll "\"cluster\": ([0-9]|\"Cluster\")" $text (printf "\"%s\": ${1}" $label) -}}
{{- end -}}
{{- $text -}}
{{- end -}}
