{{- define "nri-numa.publisher" -}}
{{- $section := .Values.config.publish | default dict -}}
{{- $address := $section.address | default "127.0.0.1:9892" -}}
- name: publish
  image: {{ include "nri-numa.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: [publish]
  env:
    - name: NRI_NUMA_NODE_NAME
      valueFrom:
        fieldRef:
          fieldPath: spec.nodeName
    - name: NRI_NUMA_HTTP_SOCKET
      value: /run/nri-numa-api/agent.sock
    {{- if .Values.controller.enabled }}
    - name: NRI_NUMA_OFFLINE_CAPACITY_FILE
      value: /run/nri-numa-capacity/capacity.json
    {{- end }}
    {{- if (.Values.config.dra | default dict).enabled }}
    - name: NRI_NUMA_DRA_HANDOVER_DIR
      value: /run/nri-numa-claims
    {{- end }}
  securityContext:
    runAsUser: 65534
    runAsGroup: 65534
    runAsNonRoot: true
    privileged: false
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
    seccompProfile:
      type: RuntimeDefault
    {{- with .Values.seLinuxOptions }}
    seLinuxOptions: {{- toYaml . | nindent 6 }}
    {{- end }}
  resources: {{- toYaml .Values.publish.resources | nindent 4 }}
  {{- if ne ($address | toString) "off" }}
  # No readiness probe: while the API server is away, placement is as good as before.
  livenessProbe:
    httpGet:
      host: {{ regexReplaceAll ":[0-9]+$" $address "" | trimPrefix "[" | trimSuffix "]" | quote }}
      port: {{ regexFind "[0-9]+$" $address }}
      path: /healthz
    periodSeconds: 30
    timeoutSeconds: 5
    failureThreshold: 4
  {{- end }}
  volumeMounts:
    # Connecting to a socket needs no writable mount.
    - name: api
      mountPath: /run/nri-numa-api
      readOnly: true
    - name: config
      mountPath: /etc/nri-numa
      readOnly: true
    - name: token
      mountPath: /var/run/secrets/kubernetes.io/serviceaccount
      readOnly: true
    {{- if .Values.controller.enabled }}
    - name: capacity
      mountPath: /run/nri-numa-capacity
    {{- end }}
    {{- if (.Values.config.dra | default dict).enabled }}
    - name: claims
      mountPath: /run/nri-numa-claims
    {{- end }}
{{- end }}

{{- define "nri-numa.publisher-volumes" -}}
- name: api
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
{{- if .Values.controller.enabled }}
- name: capacity
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
{{- end }}
# What automountServiceAccountToken would put into every container.
- name: token
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3600
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                fieldPath: metadata.namespace
{{- end }}
