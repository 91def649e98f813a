{{- define "nri-numa.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end }}

{{- define "nri-numa.selector" -}}
app.kubernetes.io/name: nri-numa
{{- if ne .Release.Name "nri-numa" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- end }}

{{- define "nri-numa.labels" -}}
{{ include "nri-numa.selector" . }}
app.kubernetes.io/part-of: nri-numa
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "nri-numa.config" -}}
{{- $base := dict "apiVersion" "nri-numa/v1" "kind" "AgentConfig" -}}
{{ merge (deepCopy .Values.config) $base | toYaml }}
{{- end }}

{{- define "nri-numa.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Where the agent serves, as (host, port, scheme) for a probe from the node. */ -}}
{{- define "nri-numa.probe" -}}
{{- $http := .Values.config.http | default dict -}}
{{- $address := $http.address | default "127.0.0.1:9891" -}}
{{- $host := regexReplaceAll ":[0-9]+$" $address "" | trimPrefix "[" | trimSuffix "]" -}}
httpGet:
  host: {{ ternary "127.0.0.1" $host (has $host (list "" "0.0.0.0" "::")) | quote }}
  port: {{ regexFind "[0-9]+$" $address }}
  {{- if $http.tlsCert }}
  scheme: HTTPS
  {{- end }}
{{- end }}

{{- define "nri-numa.security" -}}
# The directory of the runtime's socket belongs to root. Nothing else of root is needed.
runAsUser: 0
runAsGroup: 0
privileged: false
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- with .Values.seLinuxOptions }}
seLinuxOptions: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "nri-numa.mounts" -}}
# The runtime's socket. The directory and not the socket, because a runtime that restarts makes a
# new one. Writing to a socket needs no writable mount.
- name: nri
  mountPath: /var/run/nri
  readOnly: true
# The checkpoint: outlives the pod, and not a reboot.
- name: state
  mountPath: /run/nri-numa
# The node's cgroups, read only: to see what containers really have, and so that this container's
# own cpuset is not taken for the machine's.
- name: cgroup
  mountPath: /sys/fs/cgroup
  readOnly: true
- name: config
  mountPath: /etc/nri-numa
  readOnly: true
{{- if .Values.hostPaths.kubelet }}
- name: kubelet
  mountPath: /var/lib/kubelet
  readOnly: true
{{- end }}
{{- if .Values.secretName }}
- name: secret
  mountPath: /etc/nri-numa-secret
  readOnly: true
{{- end }}
{{- end }}
